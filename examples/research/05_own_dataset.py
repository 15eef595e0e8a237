"""Train on a torch Dataset, on arrays, and on a list of paths."""

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

import vitkit

SMALL = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 1, "num_heads": 2}
SETTINGS = {"spec": SMALL, "batch_size": 16, "max_steps": 4, "warmup_epochs": 0, "quiet": True}


class Shades(Dataset):
    """Sixty images: dark ones and bright ones."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        shade = 60 * (index % 2) + 100
        noise = np.random.default_rng(index).integers(-40, 40, (16, 16, 3))
        return Image.fromarray((shade + noise).astype(np.uint8)), index % 2


first = vitkit.train(Shades(), output="runs/dataset", **SETTINGS)
print("a torch Dataset:", first.stopped)

images = np.stack([np.asarray(image) for image, _ in map(Shades().__getitem__, range(60))])
labels = np.arange(60) % 2
second = vitkit.train((images, labels), output="runs/arrays", **SETTINGS)
print("arrays:", second.stopped)

for index in range(60):
    Image.fromarray(images[index]).save(f"{index}.png")
pairs = [(f"{index}.png", ("dark", "bright")[index % 2]) for index in range(60)]
third = vitkit.train(pairs, output="runs/pairs", **SETTINGS)
print("pairs of path and label:", vitkit.load(third.last).classes)
