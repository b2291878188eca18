"""A model behind HTTP, as existing clients expect it: many texts share each pass over the weights."""
