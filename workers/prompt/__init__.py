"""Text in the making: a row's columns by a template, messages by the model's chat template. Tokenises nothing."""
