"""Sound: decoding, resampling, spectrograms, encoders, and the clips of chats."""
