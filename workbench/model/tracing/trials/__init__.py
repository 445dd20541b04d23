"""What is found by running the operations of a traced model: FLOPs, gradients, independence."""
