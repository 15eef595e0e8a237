"""Fine-tune in a loop of your own: vitkit's model, transforms and parameter groups."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import vitkit

digits = vitkit.open_dataset("digits")
preprocess = vitkit.Preprocess(image_size=16, mean=(0.5,), std=(0.5,), fit="squash")
augment = vitkit.training_transform(preprocess, flip=0.0, shift=1, crop_scale=1.0)


class Augmented(Dataset):
    """The training images of one epoch; the same seed, epoch and index give the same tensor."""

    def __init__(self, split, epoch):
        self.split, self.epoch = split, epoch

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        image = augment(self.split.read(index), key=(0, self.epoch, index))
        return image, int(self.split.labels[index])


torch.manual_seed(0)
model = vitkit.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, in_chans=1,
                            num_classes=10, depth=2).train()  # fmt: skip
optimizer = torch.optim.AdamW(vitkit.parameter_groups(model, lr=1e-3, weight_decay=0.05))
for epoch in range(2):
    for images, labels in DataLoader(Augmented(digits.splits["train"], epoch), 64, shuffle=True):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
vitkit.save("digits.safetensors", model, preprocess=preprocess, classes=digits.classes)
print("better than chance:", vitkit.evaluate("digits.safetensors", digits)["top1"] > 0.3)
