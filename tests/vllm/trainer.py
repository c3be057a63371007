"""What a user adds to vLLM's workers (`worker_extension_cls`)."""


class Trainer:
    def nudge(self) -> None:
        for parameter in self.model_runner.model.parameters():  # type: ignore[attr-defined]
            parameter.data[::2].mul_(3)
