"""What goes wrong in a run, what was promised, what happened.

    python -m experiments.benchmarks.faults

Each row breaks a real run of train.py and looks at what is left. Processes that are to outlive one
of them are started without torchrun, which ends all when one fails. About 15 minutes on two cores.

`--only WORD` measures the faults whose function's name has the word in it. The other rows of the
table stay, with the machine and the date that they were measured on.
"""
