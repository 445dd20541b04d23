"""What an engine computes on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What one engine computes on.

    Attributes:
        kind: "cuda" or "cpu".
        host: the host's name.
        name: the GPU's product name, or "cpu".
        cores: logical cores that the engine runs on.
        threads: compute threads of the engine.
        memory_bytes: memory of the GPU, or of the whole host.
        gpu: what `CUDA_VISIBLE_DEVICES` says in the engine; "" for none.
        sharers: engines that have this same GPU, or these same cores; 1: it alone.
    """

    kind: str
    host: str
    name: str
    cores: tuple[int, ...]
    threads: int
    memory_bytes: int
    gpu: str = ""
    sharers: int = 1

    @property
    def backend(self) -> str:
        """The torch.distributed backend for engines like this: nccl wants a GPU for each."""
        return "nccl" if self.kind == "cuda" and self.sharers == 1 else "gloo"

    def __str__(self) -> str:
        shared = f", shared by {self.sharers} engines" if self.sharers > 1 else ""
        if self.kind == "cuda":
            return f"{self.name}{shared}"
        cores = ", ".join(map(str, self.cores))
        return f"core{'s' * (len(self.cores) > 1)} {cores}{shared}"
