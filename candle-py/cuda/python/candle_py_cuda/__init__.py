"""The engine built with CUDA: a module for `candle_py`, which takes it where it loads. Offers nothing of its own."""
