"""Train in a loop of your own with two processes: torchrun --nproc-per-node 2 08_ddp.py."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import vitkit

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same initial weights in each process
model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, image_size=32, depth=1)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(vitkit.parameter_groups(model, lr=1e-3, weight_decay=0.05))

images, labels = torch.rand(8, 3, 32, 32), torch.arange(8) % 10
mine = slice(rank * 8 // size, (rank + 1) * 8 // size)  # this process's part of the batch
for step in range(3):
    loss = cross_entropy(parallel(images[mine]), labels[mine])
    optimizer.zero_grad()
    loss.backward()  # averages the gradients of all processes
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step}: loss {total.item() / size:.3f}")

if rank == 0:
    vitkit.save("ddp.safetensors", model, preprocess=vitkit.Preprocess(image_size=32))
dist.destroy_process_group()
