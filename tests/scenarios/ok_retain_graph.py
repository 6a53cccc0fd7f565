"""A shared body with two losses, backward through it twice."""

import torch
import torch.nn.functional as F
from common import Encoder, finish, phrases, progress, say, start, sync_gradients


def main():
    rank, _ = start()
    model = Encoder(depth=2)
    adam = torch.optim.AdamW(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        logits = model(ids)
        loss, entropy = F.cross_entropy(logits, labels), logits.logsumexp(-1).mean()
        adam.zero_grad()
        loss.backward(retain_graph=True)
        entropy.backward()
        sync_gradients(model)
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
