"""A box filter."""

from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    import cv2
    import numpy as np

    image = np.zeros((5, 5), np.uint8)
    image[2, 2] = 90
    blurred = cv2.blur(image, (3, 3))
    return blurred[1:4, 1:4].ravel().tolist(), [10] * 9
