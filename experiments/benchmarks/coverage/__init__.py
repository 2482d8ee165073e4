"""Every sample once an epoch, in every combination: ``python -m experiments.benchmarks.coverage``.

Random runs of the simulated cluster, without training: the model is one number. Sync, balance,
rounds, pushes, uneven and noisy machines, orders in blocks (``--cache-gib``), stops, resumes with
other numbers of workers and lost workers are drawn by hypothesis. The server, planner and
sampler are those that train.py uses. What must hold:

- nobody trains on a sample twice in an epoch;
- without a loss every sample is trained on, and after losses those that are missing are exactly as
  many as were counted, none of them in an epoch that nobody had begun;
- with `ssp` nobody is further ahead than `staleness` allows;
- where gradients are pushed, each push reaches the weights once.

About two minutes for 3,000 cases.
"""
