"""One step on one rank: forward and backward passes, the loss, and what is executed when."""
