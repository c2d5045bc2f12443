#pragma once

#include <ATen/core/Tensor.h>

namespace cohort::ops {

/// Returns which boxes are left when each takes away those with a lower score that overlap it too much: their
/// indices, int64, the highest score first. As the operator cohort::nms it is known to LibTorch by name.
///
/// Boxes are looked at by falling score, of equal scores the one that stands first; a box is kept unless a
/// box kept before overlaps it by more than `iou_threshold`: intersection over union, so exactly the
/// threshold is kept. Two boxes without area have no overlap (0 / 0 is not more than anything). A score that
/// is not a number comes first, as LibTorch sorts. Shapes: boxes [n, 4] as (x1, y1, x2, y2) with x1 <= x2 and
/// y1 <= y2; scores [n]; n may be 0. The result is [number kept]. Dtypes: float32 or float64, boxes and
/// scores alike; under autocast float32. Not differentiable, as indices are not. CPU only. Threads: the
/// caller's alone. Throws: UsageError for other shapes or dtypes, or a threshold that is not a number.
/// Source: the meaning of torchvision.ops.nms. The bits are those of a plain loop over boxes with that
/// meaning.
at::Tensor nms(const at::Tensor& boxes, const at::Tensor& scores, double iou_threshold);

}  // namespace cohort::ops
