"""A pack that was written for NumPy 1."""

import ctypes

import numpy as np


class Invert:
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "invert", "old filters"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",), "strength": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0})}}

    def invert(self, image, strength):
        strength = np.float_(strength)  # what NumPy 2 has no more
        return (((1 - image) * strength + image * (1 - strength)).astype(image.dtype),)


class Crash:
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "crash", "old filters"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    def crash(self, image):
        ctypes.memset(0, 1, 1)


NODE_CLASS_MAPPINGS = {"OldInvert": Invert, "OldCrash": Crash}
