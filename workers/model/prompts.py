"""What `task.prompt` means for one model: the text put before every text. Tokenises nothing."""

from __future__ import annotations

from dataclasses import dataclass

from workers.model.files import ModelFiles


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The prompt in force, and the rule that chose it, in words."""

    text: str
    rule: str


def choose_prompt(files: ModelFiles, prompt: str) -> PromptChoice:
    """Choose the text that is put before every text.

    Args:
        files: What the model's files say.
        prompt: `auto`, `none`, the name of a prompt in the model's files, or literal text. A name goes before text.
    """
    if prompt == "none":
        return PromptChoice("", "task.prompt: none")
    if prompt == "auto":
        name = files.default_prompt_name
        if name is None:
            return PromptChoice("", "the model names no default prompt")
        return PromptChoice(files.prompts[name], f"the model's default prompt {name}")
    if prompt in files.prompts:
        return PromptChoice(files.prompts[prompt], f"the model's prompt {prompt}")
    named = ", ".join(sorted(files.prompts)) or "no prompts"
    return PromptChoice(prompt, f"literal text (the model's files name {named})")
