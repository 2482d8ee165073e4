"""Ultralytics' YOLO: a trainer with a batch size for each process, also on CPU.

    torchrun --nproc_per_node 2 examples/own_loop/ultralytics_yolo.py yolo11n.yaml coco8.yaml

YOLO's loss is not a mean over samples: a process divides it by its own targets' scores and
multiplies it by its images, and the trainer sums up. The scores of all are therefore summed first.
Batch norm keeps each process's own statistics, as usual.
"""

import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.torch_utils import unwrap_model

import dbsl


class JointLoss:
    """The loss of a criterion, divided by all targets and multiplied by all images."""

    def __init__(self, criterion):
        self.own, criterion.loss = criterion.loss, self
        criterion.assigner.register_forward_hook(self.count)

    def count(self, assigner, given, found):
        """Record the scores of this process's targets."""
        self.targets = found[2].sum()

    def __call__(self, preds, batch):
        """Return this process's part of the joint loss, and the logged values."""
        loss, logged = self.own(preds, batch)
        targets = self.targets.clone()
        dist.all_reduce(targets)
        share = self.targets.clamp(min=1) / targets.clamp(min=1)
        return loss * share * dist.get_world_size() / batch["scale"], logged


class UnevenTrainer(DetectionTrainer):
    """Pass the joint batch as `batch`; `local_batch_sizes` are its parts, by rank."""

    local_batch_sizes = (2, 6)

    def _build_train_pipeline(self):
        super()._build_train_pipeline()
        own = self.train_loader
        names = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn")
        kept = {name: getattr(own, name) for name in names}
        loader = DataLoader(own.dataset, self.batch_size, shuffle=True, **kept)
        self.train_loader = dbsl.uneven(loader, self.local_batch_sizes)
        self.train_loader.reset = lambda: None  # workers restart each epoch

    def _setup_train(self):
        super()._setup_train()
        model = unwrap_model(self.model)
        model.criterion = model.init_criterion()
        for branch in {"one2many", "one2one"} & {*vars(model.criterion)} or {None}:
            JointLoss(getattr(model.criterion, branch) if branch else model.criterion)
        if not self.world_size:  # on CPU, the trainer knows only one process
            self.world_size = dist.get_world_size()
            self.model = DistributedDataParallel(model, find_unused_parameters=True)

    def final_eval(self):
        """Validate the best weights, except on CPU."""
        if self.device.type != "cpu":  # with several processes, the validator needs CUDA
            super().final_eval()

    def preprocess_batch(self, batch):
        """Return the batch with its scale, n * b_i / B."""
        batch = super().preprocess_batch(batch)
        return batch | {"scale": self.train_loader.scale(len(batch["img"]))}


def train(model, data, local_batch_sizes, **settings):
    """Train a model by its name, on CPU."""
    trainer = type("Trainer", (UnevenTrainer,), {"local_batch_sizes": local_batch_sizes})
    batch = sum(local_batch_sizes)
    YOLO(model).train(trainer=trainer, data=data, batch=batch, device="cpu", **settings)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(*sys.argv[1:3], [2, 6], epochs=1)
    dist.barrier()
    dist.destroy_process_group()
