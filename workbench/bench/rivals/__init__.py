"""One process, torch's DDP, FSDP2 and tensor parallelism, and ZeRO, in turns with the workbench."""
