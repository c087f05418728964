"""Train on a few words and take the text apart and together again."""

from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    import io

    import sentencepiece

    words, model = ["kernels share memory"] * 8, io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_writer=model, vocab_size=16, model_type="char", minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    text = "share kernels"
    return [processor.decode(processor.encode(text))], [text]
