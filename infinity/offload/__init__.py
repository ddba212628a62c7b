"""Movement of weights, gradients and saved tensors between the device, RAM and disk."""
