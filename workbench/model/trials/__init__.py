"""What is found by running the operations of a traced model: gradients, independence, shards."""
