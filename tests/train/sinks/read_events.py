"""Prints what TensorBoard's own reader finds in a folder of event files, as JSON."""
import json
import sys

from tensorboard.backend.event_processing import event_accumulator

events = event_accumulator.EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "images": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
print(json.dumps({
    "scalars": {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags["scalars"]},
    "images": {tag: [[e.step, e.width, e.height, len(e.encoded_image_string)] for e in events.Images(tag)]
               for tag in tags["images"]},
    "texts": {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]},
}))
