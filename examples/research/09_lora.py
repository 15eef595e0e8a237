"""Fine-tune low-rank adapters with peft, merge them, and save a plain checkpoint."""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

import vitkit

torch.manual_seed(0)
model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, image_size=32, depth=2)
config = LoraConfig(r=4, target_modules=["qkv", "proj"], modules_to_save=["head"])
adapted = get_peft_model(model, config)
adapted.print_trainable_parameters()

images, labels = torch.rand(8, 3, 32, 32), torch.arange(8) % 10
trainable = [weight for weight in adapted.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-3)
for step in range(3):
    loss = cross_entropy(adapted(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

merged = adapted.eval().merge_and_unload()  # the adapters become a part of the weights
vitkit.save("lora.safetensors", merged, preprocess=vitkit.Preprocess(image_size=32))
same = vitkit.load("lora.safetensors").model
print("loaded as saved:", torch.allclose(same(images), merged(images), atol=1e-5))
