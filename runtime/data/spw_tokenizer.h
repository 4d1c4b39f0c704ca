/*
 * spw_tokenizer.h - BPE tokenizers, byte-level as GPT-2, Llama 3 and Qwen2/2.5/3 have them, or by characters with bytes for
 * those that have no token, as SentencePiece makes them (Llama 2, Mistral, Mixtral): text in, ids out, and back.
 *
 * Read are Hugging Face's tokenizer.json, vocab.json with merges.txt, and the tiktoken.model of Kimi's folders. Whatever else such a
 * file asks for is refused with the name of file and field, never left out in silence. Any bytes can be encoded, not
 * UTF-8 alone: a stretch of bytes that is not UTF-8 is a piece of its own, which no pattern looks at, and what stands
 * before and after it is pre-tokenized as if the text ended and began there. decode(encode(x)) is x for every x,
 * unless the tokenizer itself changes text: by NFC, by added tokens that swallow the white space around them,
 * by U+2581, which is a space to tokenizers by characters, or by a space before the text: those that add one where there is
 * none (Metaspace, but for its scheme never) take one away in decode, whoever put it there.
 *
 * Source  huggingface/tokenizers (models/bpe, pre_tokenizers, tokenizer); convert_slow_tokenizer.py of transformers.
 *
 * What counts as a letter or a number, and NFC, is Unicode's of the PCRE2 and utf8proc that are installed.
 */
#ifndef SPW_TOKENIZER_H
#define SPW_TOKENIZER_H

#include "spw_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Everything but open and close may be called by any number of threads at once. */
typedef struct spw_tokenizer spw_tokenizer;

/* A growing list of ids of one thread. Zero-initialise; emptied by count = 0, freed with spw_tokens_free(). */
typedef struct spw_tokens {
    int32_t *ids; /* (capacity) */
    uint64_t count, capacity;
} spw_tokens;
spw_status spw_tokens_push(spw_tokens *tokens, int32_t id, spw_error *err); /* SPW_ENOMEM, and nothing changed */
void spw_tokens_free(spw_tokens *tokens);

/*
 * spw_tokenizer_open - reads a tokenizer.
 *   path   a tokenizer.json; or a vocab.json, with merges.txt beside it; or a tiktoken.model, with tokenizer_config.json; or a folder that
 *          holds one of them.
 *
 * tokenizer_config.json in the same folder, if there is one, adds the eos_token, and of Llama's, Gemma's, Cohere's and GPT-NeoX's classes says by
 * add_bos_token whether bos_token comes before a text; where it does not, as transformers' classes do: of GPT-NeoX's none, of the others theirs (of Gemma 4's tuned models, too, whose
 * files leave it to the chat template). For vocab.json and merges.txt it tells
 * the pattern by its tokenizer_class too (GPT2Tokenizer or Qwen2Tokenizer; GPT-2's without that file), whether bos_token comes before a text
 * (GPT-2's class alone: OPT's) and the added tokens: its list, or where there is none those that it names. "truncation" and "padding" are about batches and have no effect; "post_processor" is never applied, see
 * spw_tokenizer_begin().
 *
 * Errors  SPW_ENOENT nothing there to read; SPW_ECORRUPT what cannot be such a file; SPW_EUNSUPPORTED what asks for more
 *         than is built (other models, normalizers, pre-tokenizers, decoders, post-processors, unknown fields);
 *         SPW_ENOMEM, SPW_ESYS. All name the file, and the field or line.
 */
spw_status spw_tokenizer_open(spw_tokenizer **out, const char *path, spw_error *err);
void spw_tokenizer_close(spw_tokenizer *t);   /* NULL is fine */
bool spw_tokenizer_is_in(const char *folder); /* whether it has the files of one */

/* The highest id plus 1. */
uint64_t spw_tokenizer_vocab(const spw_tokenizer *t);
/*
 * The same without added tokens, as any text may need it: a model's vocab_size may be larger, never smaller. Added tokens may lie
 * beyond a model's vocab_size (Gemma 3's for images); a text that has one is no text for that model.
 */
uint64_t spw_tokenizer_vocab_own(const spw_tokenizer *t);

/*
 * spw_tokenizer_encode - appends the ids of a text to tokens.
 *   text     (bytes) in      any bytes, zeros too
 *   special  recognise special tokens such as <|endoftext|> that are spelled out in the text; without it they are plain
 *            text, as training data needs it. Added tokens that are not special are always recognised.
 *
 * Computes  the ids that the tokenizers library gives without special tokens of its own (add_special_tokens=False).
 * Errors    SPW_ENOMEM; SPW_EUNSUPPORTED when the pattern engine gives up. tokens is as it was before.
 * Cost      close to linear in bytes, also for a single word of megabytes; about 24 bytes of memory per byte of the
 *           longest piece. Memory of each thread that encodes at the same time, a MiB at least, is kept until close.
 * Source    Sennrich et al. 2016, Neural Machine Translation of Rare Words with Subword Units, on bytes as in GPT-2.
 */
spw_status spw_tokenizer_encode(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special,
                                spw_tokens *tokens, spw_error *err);

/*
 * spw_tokenizer_cut - where a long text may be cut in two, so that the halves, the second one by spw_tokenizer_encode_rest(), give
 * the ids of the whole: the first such place at or after `from`, or bytes if there is none. A cut is before a line's end that follows a
 * letter or digit, or a space between such and a letter (by characters before any space that follows such); letters are ASCII's,
 * Cyrillic, ideographs and Hangul. Patterns other than those of GPT-2, Llama 3, Qwen2, gpt-oss and DeepSeek, tokens by characters that go across the start of a
 * word, and added tokens in the way, leave none.
 */
uint64_t spw_tokenizer_cut(const spw_tokenizer *t, const char *text, uint64_t bytes, uint64_t from);
/* As spw_tokenizer_encode(), of what follows a cut: no space is put before it. */
spw_status spw_tokenizer_encode_rest(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special,
                                     spw_tokens *tokens, spw_error *err);

/*
 * The same for spw_data_open(): a spw_data_encode_fn whose ctx is the tokenizer; special tokens are plain text. Fills
 * tokens (token_max) when all of them fit. spw_tokenizer_key() is its encode_key: a checksum of the tokenizer's files.
 */
spw_status spw_tokenizer_encode_data(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens,
                                     uint64_t token_max, uint64_t *token_count, spw_error *err);
uint64_t spw_tokenizer_key(const spw_tokenizer *t);

/*
 * spw_tokenizer_decode - the bytes of ids, added tokens as they are spelled.
 *   ids      (count)
 *   special  false leaves special tokens out
 *   text     (bytes_max) out, not terminated; NULL to be told bytes_out alone
 * Errors  SPW_EINVAL naming the first id that is outside the vocabulary or unused, or when bytes_max is less than
 *         needed. The bytes of a part of a text need not be whole characters.
 */
spw_status spw_tokenizer_decode(const spw_tokenizer *t, const int32_t *ids, uint64_t count, bool special, char *text,
                                uint64_t bytes_max, uint64_t *bytes_out, spw_error *err);

/* The bytes of one token, not terminated; NULL for an id without one. They live as long as the tokenizer. */
const char *spw_tokenizer_text(const spw_tokenizer *t, int32_t id, uint64_t *bytes_out);
/* The id of the token with these bytes (" the", not its spelling in the file); added tokens first; -1: there is none. */
int32_t spw_tokenizer_find(const spw_tokenizer *t, const char *text, uint64_t bytes);

/*
 * The token that ends a document: <|endoftext|> or <|end_of_text|>, else the eos_token of tokenizer_config.json, else
 * <|im_end|>, else </s>; -1 when there is none of them.
 */
int32_t spw_tokenizer_end(const spw_tokenizer *t);
/*
 * The tokens that the post-processor, or transformers' class of the tokenizer, puts before every text (Llama 3: <|begin_of_text|>; GLM-4:
 * [gMASK] and <sop>). encode does not; data and prompts do.
 */
enum { SPW_BEGIN_MAX = 4 };
typedef struct spw_begin {
    uint32_t count; /* 0: none */
    int32_t ids[SPW_BEGIN_MAX];
} spw_begin;
spw_begin spw_tokenizer_begin(const spw_tokenizer *t);
spw_status spw_tokens_push_begin(spw_tokens *tokens, const spw_begin *begin, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
