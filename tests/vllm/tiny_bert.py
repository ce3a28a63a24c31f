"""A cross-encoder of BERT's kind, which tells the two texts of a pair apart by segment ids: random weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CORPUS = ("The capital of France is Paris. Add 4991 and 6299, then compare both texts of a pair with each other.",)


def make_tiny_bert(path: Path) -> None:
    """Write a checkpoint with one label, with its tokenizer. vLLM has no attention for heads below 32 on a CPU."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    described = {**names, "mask_token": "[MASK]", "tokenizer_class": "BertTokenizer", "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=512,
        num_labels=1,
        initializer_range=0.3,
        pad_token_id=0,
    )
    BertForSequenceClassification(config).to(torch.float32).save_pretrained(path)


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer
