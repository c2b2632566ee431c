"""Shapes of a whole model."""


def resnet50_shapes():
    """(name, shape) of ResNet-50's 161 tensors: 25.6 M elements, 54 tensors of two or more dimensions."""
    shapes = [("conv1.weight", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))]
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name, outputs = f"layer{stage}.{block}", 4 * width
            convs = [
                ("conv1", (width, inputs, 1, 1)),
                ("conv2", (width, width, 3, 3)),
                ("conv3", (outputs, width, 1, 1)),
            ]
            if block == 0:
                convs.append(("downsample", (outputs, inputs, 1, 1)))
            for conv, shape in convs:
                shapes += [(f"{name}.{conv}.weight", shape)]
                shapes += [(f"{name}.{conv}.bn.{part}", shape[:1]) for part in ("weight", "bias")]
            inputs = outputs
    return [*shapes, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]
