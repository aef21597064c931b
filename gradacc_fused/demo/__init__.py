"""The demo: a small GPT on real text, trained on whole batches, with our window, and with the usual loop."""
