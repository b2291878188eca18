"""New weights for a model, made layer by layer: what a text brings to every linear map, and what is kept on the way."""
