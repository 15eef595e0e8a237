"""A loss, a metric and a callback of your own, as plain functions and classes."""

import torch

import vitkit

SMALL = {"image_size": 8, "patch_size": 4, "width": 32, "depth": 1, "num_heads": 2,
         "in_channels": 1}  # fmt: skip


def focal_loss(logits, targets):
    """Weight each image by how wrong it is: Lin et al. 2017, Eq. 4, gamma = 2."""
    log_p = logits.log_softmax(-1).gather(1, targets[:, None])
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


class PrintLoss(vitkit.Callback):
    """Print the loss of every fifth step."""

    def after_step(self, trainer, result):
        if trainer.progress.step % 5 == 0:
            print(f"step {trainer.progress.step}: loss {result.loss:.3f}")


torch.manual_seed(0)
result = vitkit.train("digits", spec=SMALL, batch_size=64, max_steps=10, warmup_epochs=0,
                      loss=focal_loss, callbacks=[PrintLoss], output="runs/focal", quiet=True,
                      lr=3e-3)  # fmt: skip
print("trained:", result.stopped)
