"""Which way of training, on these machines: ``train.py --advise``, ``python -m dbsl.advise``."""
