/*
 * spw_data.h - training data as windows of tokens and targets: text, token streams and JSON lines in, int32 out.
 *
 * The order is a pure function of (seed, position): position p of the training split is the p-th sequence ever drawn,
 * epochs included, so a position is all that a checkpoint has to keep, and who reads it (which rank, which batch) changes
 * nothing. Files stay on disk: a window is read when it is asked for.
 *
 *   text       any file; bytes are tokens (vocabulary 256), or what the encoder makes of it
 *   llm.c      1024 bytes of int32 header (magic 20240520: uint16 tokens, 20240801: uint32), then the tokens
 *   llmq       1024 bytes of header ("BIN.TOK\n"), int32 tokens, and where some have no loss a bit for each, 1: what follows it has
 *   Megatron   PREFIX.bin with the tokens (u8, i8, i16, u16, i32, i64) and PREFIX.idx with lengths, offsets, documents
 *   JSON lines an object a line; a field holds the text of one document, another may hold a prompt before it, or a field
 *              holds a conversation (spw_chat.h); or two fields hold a chosen and a rejected answer to the same prompt. In place
 *              of text a field may hold a list of tokens, in all lines of a file: documents as they are, nothing is put around them
 *
 * JSON lines and encoded text are tokenised once, into a file of a cache folder (encode.c); later runs find it there.
 */
#ifndef SPW_DATA_H
#define SPW_DATA_H

#include "spw_tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPW_DATA_SOURCES_MAX = 64 };

typedef struct spw_data spw_data;
typedef enum spw_split { SPW_SPLIT_TRAIN, SPW_SPLIT_VALIDATION } spw_split;

typedef enum spw_data_format {
    SPW_DATA_AUTO, /* by content (llm.c, llmq, Megatron's index), then by extension (.bin, .jsonl, .ndjson, .json), else text */
    SPW_DATA_TEXT,
    SPW_DATA_LLMC,
    SPW_DATA_LLMQ,
    SPW_DATA_MEGATRON,
    SPW_DATA_JSONL,
    SPW_DATA_FORMAT_COUNT
} spw_data_format;
const char *spw_data_format_name(spw_data_format f); /* "auto", "text", "llm.c", "llmq", "megatron", "jsonl" */
bool spw_data_format_parse(const char *name, spw_data_format *out);

/*
 * spw_data_recognise - what SPW_DATA_AUTO takes a file for. A .json file is JSON lines where it begins with an object.
 *   warned  in/out   whether it was logged of a text that it looks like JSON lines, which is said of the first one
 *
 * Errors  SPW_EUNSUPPORTED for what is known to be something else (compressed files, tables, weights, a JSON array), by
 *         what it is and with what to do; SPW_ECORRUPT for a .bin or .idx that is neither format's, and for a .json file
 *         that begins with an object over several lines. SPW_ESYS, SPW_EIO: the file.
 */
spw_status spw_data_recognise(spw_data_format *out, const char *path, bool *warned, spw_error *err);

/*
 * JSON lines, for others that read them (lines.c).
 * spw_data_line_open - a line without its end; *out is NULL for a blank one. Numbers of any size may stand in it, and a byte
 *                      order mark before it.
 * spw_data_line_text - a field's text, which lives as long as the line.
 * Errors  SPW_ECORRUPT, without file and line: what is not a JSON object or names a member twice; a field that is missing or
 *         no string. Numbers beyond double's range are not JSON to it.
 */
typedef struct spw_data_line spw_data_line;
spw_status spw_data_line_open(spw_data_line **out, const char *line, uint64_t bytes, spw_error *err);
spw_status
spw_data_line_text(spw_data_line *line, const char *field, const char **text, uint64_t *bytes, spw_error *err);
/*
 * spw_data_line_has_tokens - whether a field holds tokens in place of text: a list that begins with a number, or is empty.
 * spw_data_line_tokens - adds them, and as targets the same, or -1 where the list of the field labels, if the line has one, says that there is no
 *                        loss by a number below 0 (-100 as transformers has it), or TRL's completion_mask or assistant_masks by a 0. labels
 *                        NULL: none are looked for.
 * Errors  SPW_ECORRUPT naming field and place: no list, no token's number, labels of another length or of other tokens. SPW_EUNSUPPORTED for an
 *         attention_mask (looked at with labels) that hides some.
 */
bool spw_data_line_has_tokens(const spw_data_line *line, const char *field);
spw_status spw_data_line_tokens(const spw_data_line *line, const char *field, const char *labels, spw_tokens *tokens,
                                spw_tokens *targets, spw_error *err);
/*
 * spw_data_line_lengths - adds how long the documents are that a line of count tokens holds, one behind the other: by TRL's seq_lengths, or by
 *                         position_ids that begin at 0 with each. Without either all are one.
 * Errors  SPW_ECORRUPT: lengths that do not add up, positions that neither go on nor begin.
 */
spw_status spw_data_line_lengths(const spw_data_line *line, uint64_t count, spw_tokens *lengths, spw_error *err);
void spw_data_line_close(spw_data_line *line); /* NULL is fine */

/*
 * What stands between two documents. A document is a text file, a JSON line, an entry of Megatron's document index, or in
 * an llm.c stream what ends with the end-of-text token (which there begins the next one; the boundary is behind it), and of llmq, whose files
 * do not say which token that is, with the one that is set.
 */
typedef enum spw_documents {
    SPW_DOCUMENTS_PACKED,   /* nothing: windows cut through the stream */
    SPW_DOCUMENTS_MASK,     /* windows are the same; the first token of a document is nobody's target (-1) */
    SPW_DOCUMENTS_SEPARATE, /* and it is marked, for attention that does not look beyond it */
    SPW_DOCUMENTS_WHOLE,    /* and windows hold whole ones, padded without loss; not in files of tokens */
} spw_documents;
bool spw_documents_parse(const char *name, spw_documents *out); /* "packed", "mask", "separate", "whole" */

/* What a window's token has besides its id where documents are separate and one begins there. Ids are below it. */
enum { SPW_TOKEN_BEGINS = 1 << 30 };

/*
 * An encoder: bytes of text (UTF-8, not terminated) to token ids.
 *   rest         of a text file: what follows the piece before, and no beginning of a text
 *   tokens       (token_max) out   filled when *token_count <= token_max; else the call is made again with more room
 *   token_count  out               how many the text has
 * Errors  its own; the message gets file and position in front. Called by the thread in spw_data_open() only.
 * A text file comes in pieces of at most a MiB, cut where no pre-tokenizer joins both sides, if there is such a place: before a line's
 * end that follows a letter or digit, and if the piece has none a space between such and a letter. A field of a JSON line comes whole; prompt and text in two calls.
 */
typedef spw_status (*spw_data_encode_fn)(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens,
                                         uint64_t token_max, uint64_t *token_count, spw_error *err);

struct spw_chat; /* spw_chat.h */
typedef struct spw_data_source {
    const char *path; /* file, glob (unless a file has that name; ~/: home folder), or PREFIX of a Megatron dataset */
    double weight;    /* share of the sequences, relative to the other sources; above 0 */
} spw_data_source;

typedef struct spw_data_options {
    /* Either files or globs that make one source, each window once an epoch, or sources with weights. */
    const char *const *patterns;
    uint32_t pattern_count;
    const spw_data_source *sources;
    uint32_t source_count; /* up to SPW_DATA_SOURCES_MAX; 0: patterns */

    uint64_t seq_length;     /* T; a window is T + 1 tokens, and the next begins T further on */
    double validation_split; /* share of a source's windows held out: the last ones of files, see spw_data_open() */
    uint64_t seed;
    uint64_t vocab; /* a token that is not below it is an error when its window is read; 0: not checked */

    spw_data_format format;
    const char *lines_for; /* a setting that is of no use without JSON lines, named where there are none; NULL: none */
    const char *text_field, *prompt_field; /* of JSON lines; NULL: "text" and none. Tokens of the prompt get no loss. */
    const char *
        labels_field; /* of lines of tokens, which of text_field's get none (spw_data_line_tokens); NULL or "": "labels" */
    spw_documents documents;
    /* Lines with the field messages_field (NULL or "": "messages", or "conversations") are conversations of this layout, whose
     * tokenizer is encode's; only the assistant's tokens get loss, and no token is put behind its end. NULL: all are text. */
    struct spw_chat *chat;
    const char *messages_field;
    /*
     * Lines are pairs of answers (chosen_field, rejected_field; NULL or "": "chosen", "rejected") to a prompt (prompt_field; NULL or "":
     * "prompt") that they may have; null and what is empty is no prompt. A pair becomes two documents, one right behind the other in one
     * window: the prompt and the chosen answer, the prompt and the rejected one. So the documents of a window are chosen, rejected,
     * chosen, rejected, ..., and what is marked behind a rejected one and has no target is padding. Only answers have targets:
     *   texts          as text_field's, behind the prompt's text; without a prompt what both begin with has no targets
     *   conversations  (lists of messages; chat is needed) the prompt is a list that comes before both lists, or is in both: what both
     *                  begin with has no targets. A prompt that is text is a user's turn before lists that begin with the assistant,
     *                  and else passed over, for the lists have it.
     * Left out are pairs of more than seq_length tokens, both documents together, and those with an answer that has nothing to learn:
     * the same as the other, or without a target. Needs documents whole and files of JSON lines.
     */
    bool pairs;
    const char *chosen_field, *rejected_field;

    spw_data_encode_fn encode; /* NULL: bytes are tokens */
    void *encode_ctx;
    uint64_t encode_key; /* names the encoder in the cache: a checksum of its vocabulary */
    /* Ends every document of text that is encoded, and of JSON lines; delimits llm.c's and llmq's streams. Not set: none after encoded
     * text, a newline after bytes of JSON lines, 50256 and 128000 in llm.c's 16 and 32 bit streams. */
    int32_t end_of_text;
    bool end_of_text_set;
    /* Begins every document of text that is encoded, and of JSON lines that are no conversations: its first tokens. */
    spw_begin begin_of_text;
    const char *cache_dir; /* NULL or "": spillway/tokens below $XDG_CACHE_HOME or ~/.cache */
} spw_data_options;
uint64_t spw_data_encode_key(const spw_data_options *o); /* of the encoder and what texts begin with */

/*
 * spw_data_open - finds and checks the files; tokenises what has to be and is not in the cache yet.
 *
 * Held out are windows at the ends of files, of a source's first k files together validation_split of their windows, rounded:
 * of many files with a window each, one in twenty at 0.05. One at least when it is above 0 and there are two, and one is left.
 *
 * Errors  SPW_ENOENT naming a pattern that matches nothing; SPW_ESYS for an unreadable file; SPW_ECORRUPT naming file,
 *         field and offset of bytes that are not the format's; SPW_EUNSUPPORTED for files known to be something else;
 *         SPW_ECONFIG where lines_for has no JSON lines, or pairs are to be read of another file, before anything is tokenised;
 *         and where pairs are conversations and there is no chat.
 *         SPW_EINVAL when a source's files are all empty or shorter than one sequence (with what was found and needed), or no
 *         pair of theirs is left.
 * Cost    a read of each file's header; of llmq's bits of loss, 256 KiB at most; of Megatron's index, all; of JSON lines the first, and
 *         of files to tokenise, all, once.
 * Memory  spw_data_memory_bytes() afterwards, independent of the files' sizes; while it tokenises, a piece of text (a
 *         line of JSON lines, up to 64 MiB, with what jansson makes of it) and its tokens.
 */
spw_status spw_data_open(spw_data **out, const spw_data_options *options, spw_error *err);
void spw_data_close(spw_data *data); /* NULL is fine */

uint64_t spw_data_bytes(const spw_data *data);  /* of the files as they are on disk, without caches and indexes */
uint64_t spw_data_tokens(const spw_data *data); /* in all of them */
uint32_t spw_data_file_count(const spw_data *data);
uint64_t
spw_data_sequences(const spw_data *data, spw_split split); /* windows in all files: with one source, an epoch */
uint64_t spw_data_memory_bytes(const spw_data *data);      /* heap that data holds: tables per file */
/* Whether rounding every file's share by itself, as was done once, holds out other windows; and how many those are. */
bool spw_data_split_moved(const spw_data *data, uint64_t *held_before);
/* Windows in which no token has a target, of JSON lines with prompts or conversations; cut: documents longer than a window, or
 * pairs that were left out. */
uint64_t spw_data_untargeted(const spw_data *data, uint64_t *cut);
uint64_t spw_data_pairs(const spw_data *data); /* that were not left out, in all files; 0 unless pairs were asked for */
/* Share of tokens that are somebody's target, where that was counted, in all files; of others 1. */
double spw_data_targeted(const spw_data *data);
/* What was recognised: "text", or "2 llm.c u16, 1 jsonl"; never NULL. */
const char *spw_data_formats(const spw_data *data);
/*
 * What decides the ids besides the files: "bytes", "tokenizer " and its key, with that of the layout of conversations if there
 * is one and of the fields of pairs (", pairs KEY", ", chat and pairs KEY"), or "none" where files hold tokens already, with
 * the token that ends documents if one was set and documents are masked; never NULL.
 */
const char *spw_data_encoder(const spw_data *data);
const char *
spw_data_chat(const spw_data *data); /* spw_chat_says() of the layout; "" without one or without JSON lines */

/*
 * spw_data_fill - the sequences at positions [first, first + count).
 *   tokens, targets  (count, T) out   targets: the next token, or -1 for no loss. Tokens may be marked by SPW_TOKEN_BEGINS
 *
 * Computes  One source of n windows: window permute(p mod n; seed, p div n) at position p, a keyed permutation per
 *           epoch; held-out windows in their order. Several sources: draws go to them so that after any number each has
 *           had its share to within one; a draw is its source's next sequence, in epochs of its own (order.c). Held-out
 *           windows are mixed by the same weights, each source's in their order and around again.
 * Errors    SPW_EIO, SPW_ECORRUPT (a token outside the vocabulary, with file and position; a file cut since it was
 *           opened). SPW_EINVAL for a split without sequences.
 * Threads   any, at the same time.
 * Cost      a read of T + 1 tokens per sequence; with sources, up to 65536 draws on paper per call.
 */
spw_status spw_data_fill(const spw_data *data, spw_split split, uint64_t first, uint64_t count, int32_t *tokens,
                         int32_t *targets, spw_error *err);
/*
 * spw_data_window - a number for the window at a position: the same whenever it is drawn, and no other's.
 *
 * Computes  numbers of training windows below spw_data_sequences(SPW_SPLIT_TRAIN), those of held-out ones from there on and below the
 *           sum of both. A number is the window's place in the files: another seed or other weights draw it elsewhere and leave it.
 *           UINT64_MAX for a split without sequences.
 * Threads   any, at the same time.
 * Cost      nothing is read; with sources, up to 65536 draws on paper.
 */
uint64_t spw_data_window(const spw_data *data, spw_split split, uint64_t position);
/* SPW_EINVAL where no token of all training sequences has a target: reads them up to the first that has one. Errors of filling. */
spw_status spw_data_check_targets(const spw_data *data, spw_error *err);
/* Begins to bring to the page cache what spw_data_fill() of the same positions will read, and waits for none of it. Any thread. */
void spw_data_ask(const spw_data *data, spw_split split, uint64_t first, uint64_t count);

#ifdef __cplusplus
}
#endif
#endif
