"""Encodings of what travels: a codec turns fp32 values into packed bytes and back.

    fp32, fp16, bf16   the dtype itself (`cast`)
    eXmY               a small float of 1 + X + Y bits (`small_float`)
    int8, sign         multiples of a block's scale, -127 to 127, or plus and minus it (`scaled`)
    levels             four levels of the message, in 2 bits (`levels`)
    topk               the largest magnitudes (`sparse`)
    chunk_topk         the largest of each chunk, as fp32 or, with _2bit, as levels (`sparse`)
    dropout, dare      random values (`sparse`)

Every code is finite: codecs refuse NaN and infinities, with an error that says which value of how many it is. The
module `codec` says how to add one.
"""

from lowcomm.codecs.codec import Codec, check_feedback, in_one_piece, make_codec, message_seed

__all__ = ["Codec", "check_feedback", "in_one_piece", "make_codec", "message_seed"]
