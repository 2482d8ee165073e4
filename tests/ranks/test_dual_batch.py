"""The plain loops of examples/own_loop/dual_batch.py are train.py's, to the bit."""

import copy
import importlib.util
import os

import pytest
from torch import nn

import train
from dbsl.data.sources import TensorData
from tests.helpers import ROOT, free_port, own, place_of, table

EPOCHS = 3
SETTINGS = {
    "bsp": {"large_batch_size": (12,), "small_workers": 1, "small_batch_size": (5,)},
    "step": {"sync": "step", "local_batch_sizes": (4, 12)},
}


def example():
    spec = importlib.util.spec_from_file_location(
        "dual_batch", ROOT / "examples/own_loop/dual_batch.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(rank, port, folder, sync):
    """Return the weights that train.py and the example come to from the same ones."""
    os.environ.update(place_of(rank, 2, port))
    loops, split, found, whole = example(), table(96, 64, 10), [], train.train
    config = train.Config(
        epochs=EPOCHS, lr=0.05, lr_milestones=(), warmup_epochs=0.0, slope=(0.001,),
        intercept=(0.01,), mixed_precision="no", report_to="none", cpu_threads=1, save_best=False,
        output_dir=str(folder), **SETTINGS[sync],
    )  # fmt: skip

    def trained(training):
        plain, plan = copy.deepcopy(training.model), training.workers.plans.first[0]
        whole(training)
        if sync == "bsp":
            loops.train_rounds(plain, split, plan, EPOCHS)
        else:
            sizes = [worker.local_batch_size for worker in plan.workers]
            loops.train_jointly(plain, split, sizes, EPOCHS)
        for model in (training.model, plain):
            parameters = nn.utils.parameters_to_vector(model.parameters())
            found.append(parameters.detach().numpy())

    with pytest.MonkeyPatch.context() as patch:
        build = {"build_optimizer": lambda model, config: loops.build_optimizer(model)}
        own(patch, TensorData(split, split, 10), loops.build_model, train=trained, **build)
        train.main(config)
    return found


@pytest.mark.parametrize("sync", SETTINGS)
def test_the_plain_loops_of_dual_batch_are_train_py_to_the_bit(run_ranks, tmp_path, sync):
    for trained, plain in run_ranks(both, free_port(), tmp_path / "run", sync):
        assert (trained == plain).all()
