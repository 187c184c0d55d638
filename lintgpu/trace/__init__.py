"""From a target to the ops of one step, in a worker process that builds the model on meta tensors."""
