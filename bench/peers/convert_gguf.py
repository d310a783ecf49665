"""llama.cpp's converter on a native-format V4 folder, without its tokenizer: convert_gguf.py LLAMA_CPP NATIVE OUT."""

import sys

root, source, target = sys.argv[1:4]
sys.path[:1] = [root]
import convert_hf_to_gguf
from conversion import get_model_class


def no_vocab(self):
    self._set_vocab_none()
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])


get_model_class("DeepseekV4ForCausalLM").set_vocab = no_vocab
sys.argv = ["convert", source, "--outfile", target, "--outtype", "bf16"]
convert_hf_to_gguf.main()
