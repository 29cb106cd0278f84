"""sentence-transformers' `encode` with last-token pooling. It sorts by length itself and batches by 32.

`encode` takes texts. Here a text carries its ids, and the model's tokenisation step reads them from there, so that it
runs the same ids as all others and its time holds no tokenisation either.
"""

from collections.abc import Sequence
from typing import Any

from peers.protocol import Ids, Kind, NotPossible, Rows, padded, serve


class TextOfIds(str):
    """As long as its ids, which is what `encode` sorts by."""

    __slots__ = ("ids",)

    def __new__(cls, ids: Ids) -> "TextOfIds":
        text = super().__new__(cls, "x" * len(ids))
        text.ids = ids
        return text


def from_ids(texts: Sequence[TextOfIds], **_: Any) -> dict[str, Any]:
    """In place of the tokenizer."""
    import torch

    input_ids, mask = padded([text.ids for text in texts], range(len(texts)))
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask), "modality": "text"}


class SentenceTransformers:
    """Settings: checkpoint, dtype, threads. No options."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Nothing is made beforehand."""

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        import sentence_transformers
        import torch
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        torch.set_num_threads(settings["threads"])
        options = {"dtype": getattr(torch, settings["dtype"])}
        body = Transformer(settings["checkpoint"], max_seq_length=128, model_kwargs=options)
        pooling = Pooling(body.get_embedding_dimension(), pooling_mode="lasttoken")
        self.model = SentenceTransformer(modules=[body, pooling], device="cpu")
        self.model.preprocess = from_ids
        return {"sentence-transformers": sentence_transformers.__version__, "torch": torch.__version__}

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        if kind != "last":
            raise NotPossible("only last-token pooling is set up")
        return self.model.encode([TextOfIds(ids) for ids in sequences], show_progress_bar=False)

    def rows(self, result: Any) -> Rows:
        return list(result)


if __name__ == "__main__":
    serve(SentenceTransformers())
