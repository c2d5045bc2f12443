"""The PyTorch peer of examples/rpc_rnn: the same model, data, optimizer and clock, by torch.distributed.rpc.

    python3 benchmarks/rpc/rnn.py [STEPS] [all|tcp]

Embedding and decoder lie on two workers, the LSTM on a third, each a process with one thread for operators. The last
argument says which transports TensorPipe may use. The first tenth of the steps is not timed.
"""

import sys
import time

import pytorch_workers as workers
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

TOKENS, WIDTH, LENGTH, BATCH = 50, 16, 12, 4


class Embedder(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens):
        return self.table(tokens)


class Decoder(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, hidden):
        return self.linear(hidden)


def sentences(step):
    """Sentences in which each token follows from the one before: [LENGTH + 1, BATCH]."""
    places = torch.arange(LENGTH + 1).unsqueeze(1)
    return torch.remainder(places * 7 + torch.arange(BATCH) * 3 + step, TOKENS)


def loss_of(embedder, lstm, decoder, step):
    tokens = sentences(step)
    hidden, _ = lstm(workers.call(embedder, Embedder.forward, tokens[:LENGTH]))
    logits = workers.call(decoder, Decoder.forward, hidden)
    return nn.functional.cross_entropy(logits.view(-1, TOKENS), tokens[1:].reshape(-1))


def train(steps):
    embedder, decoder = rpc.remote("ps1", Embedder, (1,)), rpc.remote("ps2", Decoder, (2,))
    torch.manual_seed(3)
    lstm = nn.LSTM(WIDTH, WIDTH)
    parameters = workers.parameters_of(lstm)
    for module in (embedder, decoder):
        parameters += workers.call(module, workers.parameters_of)
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5, momentum=0.9)
    seconds, warm_up = 0.0, steps // 10
    for step in range(steps):
        begin = time.perf_counter()
        with dist_autograd.context() as context:
            loss = loss_of(embedder, lstm, decoder, step)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        if step >= warm_up:
            seconds += time.perf_counter() - begin
        if (step + 1) % 5 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}")
    print(f"{(steps - warm_up) / seconds:.0f} steps a second", flush=True)


if __name__ == "__main__":
    workers.run(
        ["trainer", "ps1", "ps2"],
        sys.argv[2] if len(sys.argv) > 2 else "all",
        train,
        int(sys.argv[1]) if len(sys.argv) > 1 else 20,
    )
