"""One PyTorch or Hugging Face model on many devices: one mesh, one config, one call."""
