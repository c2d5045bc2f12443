#pragma once

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <vector>

#include "same_bits.h"

/// Small models of the shapes that scripts must hold for.
namespace cohort::test {

namespace nn = torch::nn;

inline nn::Sequential small_mlp(std::int64_t width = 64) {
  return nn::Sequential(nn::Linear(32, width), nn::BatchNorm1d(width), nn::GELU(), nn::Dropout(0.1),
                        nn::Linear(width, width), nn::SiLU(), nn::Linear(width, 10));
}

inline nn::Sequential small_conv_net() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                        nn::MaxPool2d(2), nn::Conv2d(8, 16, 3), nn::GELU(), nn::AdaptiveAvgPool2d(1),
                        nn::Flatten(), nn::Dropout(0.3), nn::Linear(16, 10));
}

/// Tokens to logits of the next one, flat.
struct TaggerImpl : nn::Module {
  TaggerImpl()
      : embedding(register_module("embedding", nn::Embedding(50, 16))),
        lstm(register_module("lstm",
                             nn::LSTM(nn::LSTMOptions(16, 32).num_layers(2).dropout(0.2).batch_first(true)))),
        head(register_module("head", nn::Linear(32, 50))) {}
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor hidden = std::get<0>(lstm->forward(embedding->forward(tokens)));
    return head->forward(hidden).view({-1, 50});
  }
  nn::Embedding embedding;
  nn::LSTM lstm;
  nn::Linear head;
};
TORCH_MODULE(Tagger);

/// A transformer layer with attention and dropout, and a head on each position.
struct EncoderImpl : nn::Module {
  explicit EncoderImpl(std::int64_t width = 32)
      : layer(register_module(
            "layer",
            nn::TransformerEncoderLayer(
                nn::TransformerEncoderLayerOptions(width, 4).dim_feedforward(2 * width).dropout(0.1)))),
        head(register_module("head", nn::Linear(width, 10))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = head->forward(layer->forward(x));
    return y.reshape({-1, 10});
  }
  nn::TransformerEncoderLayer layer;
  nn::Linear head;
};
TORCH_MODULE(Encoder);

/// What ResNets and VGGs are made of: strided convolutions, norms, a sum of two ways, in-place relu.
struct ResidualImpl : nn::Module {
  ResidualImpl()
      : first(register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1).bias(false)))),
        second(register_module("second",
                               nn::Conv2d(nn::Conv2dOptions(8, 16, 3).stride(2).padding(1).bias(false)))),
        shortcut(register_module("shortcut", nn::Conv2d(nn::Conv2dOptions(8, 16, 1).stride(2).bias(false)))),
        norm1(register_module("norm1", nn::BatchNorm2d(8))),
        norm2(register_module("norm2", nn::BatchNorm2d(16))),
        norm3(register_module("norm3", nn::BatchNorm2d(16))),
        head(register_module("head", nn::Linear(16, 10))) {}
  at::Tensor forward(const at::Tensor& images) {
    at::Tensor x = norm1->forward(first->forward(images));
    x = at::max_pool2d(x.relu_(), 2);
    x = (norm2->forward(second->forward(x)) + norm3->forward(shortcut->forward(x))).relu_();
    return head->forward(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }
  nn::Conv2d first, second, shortcut;
  nn::BatchNorm2d norm1, norm2, norm3;
  nn::Linear head;
};
TORCH_MODULE(Residual);

inline at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(logits, target);
}

}  // namespace cohort::test
