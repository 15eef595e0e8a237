"""Files and folders of timm."""
