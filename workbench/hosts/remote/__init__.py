"""Engines on other hosts, started by ipyparallel's launchers: SSH, Slurm, MPI and the like.

    this host                                       another host
    supervisor ---- starts, by a launcher --------> agent, one for each engine
      reception <---------- registers ------------- what its host is, and where it listens
      relay  ---- signals, "are you there?" ------> agent
       (its     <--- how it is, how it ended -----   engine (the agent's child)
       process
       id is the engine's)

A launcher only brings agents to their hosts. For each engine the supervisor then runs a relay,
here: a process that ends when the engine does, in the same way, and that hands on the signals
that it gets. So supervisor, job server and notebooks watch, signal and end engines by process id,
wherever those are, and no id of another host is ever signalled here.

Nothing outlives the supervisor: an agent ends, and its engine with it, when its connection to the
reception closes; and an engine ends when its relay is gone, or silent. A relay ends when its agent
is: so a host that is switched off is an engine that died, like others.

All hosts have to see the cluster's directory, by the same path, and the same Python environment;
an agent that does not says so, and the cluster does not start.
"""
