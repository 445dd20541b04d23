"""The columns of a run's metrics: what one row, of one step and rank, says."""

Row = dict[str, float]

COLUMNS = (
    "step",  # optimizer updates before this one
    "rank",
    "time",  # seconds since the epoch, at the end of the step
    "loss",  # mean over the step's global batch
    "samples_per_s",  # of the whole world
    "compute_s",  # the step's seconds outside collectives
    "communication_s",  # blocked in collectives, as long as the rank that waited least
    "wait_s",  # blocked for longer than that: for slower ranks
    "received_bytes",  # that collectives of the step brought to this rank
    "tensor_bytes",  # live tensors at the end of the step
    "weight_bytes",  # of them, weights and the model's buffers
    "optimizer_bytes",  # of them, the optimizer's state; what is left are gradients
    "staging_bytes",  # memory beside tensors that collectives travel through
    "peak_bytes",  # highest since the last row, shared memory included; first: and the start-up
    "rss_bytes",  # resident memory of the process
    "gpu_bytes",  # allocated on this rank's GPU; 0 without one
    "accuracy",  # on the test split; NaN where it was not evaluated after this step
)
