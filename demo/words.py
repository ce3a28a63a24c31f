"""The word list of the demo tasks: 95 short English words, each one token of the demo tokenizer."""

from typing import Final

_LIST: Final = """
ant apple arm ball bank bean bear bed bell bird boat book box bread brick bus cake car cat chair
clock cloud coat corn cow crow cup desk dog door drum duck ear egg eye farm fish flag fork fox frog
game gate glass goat hand hat hen hill horn horse ice jam key king kite lake lamp leaf lion map milk
moon moss mouse nest nose oak owl pan pear pen pig plum pond queen rain ring road rope rose sail
salt seed ship shoe snow spoon star stone sun tea tent tree wolf
"""

WORDS: Final = tuple(_LIST.split())
