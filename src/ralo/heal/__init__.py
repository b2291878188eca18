"""Healing: the weights that a pack changed learn, by distillation, to give again what the dense model gives."""
