"""What the job server sees of ranks and hosts: who is silent, slow, short of memory or gone."""
