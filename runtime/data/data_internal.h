/* Inside data: a file as a row of tokens, and the order in which windows of it are drawn. */
#ifndef SPW_DATA_INTERNAL_H
#define SPW_DATA_INTERNAL_H

#include "spw_chat.h"

/* ---------------------------------------------------------------- files (files.c, megatron.c, encode.c) */

typedef enum data_element { E_U8, E_I8, E_I16, E_U16, E_I32, E_U32, E_I64, E_CACHE16, E_CACHE32 } data_element;
uint32_t spw__data_element_bytes(data_element e);

/* Making tokens of so much text is said: it takes seconds, or hours. */
enum { NOTED_BYTES = 16 << 20 };

/* The two top bits of a cached token. */
enum { CACHE_FIRST = 2, CACHE_NO_LOSS = 1 }; /* the first token of its document; as a target it has no loss */

typedef struct data_file {
    char *path;  /* for messages: what the user has */
    char *store; /* the file the tokens are read from: path, or its tokens in the cache */
    int fd;      /* of store; -1: opened for each read */
    spw_data_format format;
    data_element element;
    uint64_t bytes; /* of path */
    bool made;      /* its tokens were not in the cache */
    bool of_tokens; /* JSON lines that hold tokens in place of text */
    uint64_t untargeted,
        cut;                /* windows without a target, and documents that one does not hold, where that was counted */
    uint64_t pairs;         /* that it holds; those that were left out are cut */
    uint64_t targets;       /* tokens that are somebody's target, where that was counted; 0: not */
    uint64_t begin, tokens; /* byte offset of the first token in store, and how many there are */
    int32_t delimiter;      /* llm.c, llmq: the token that ends a document; -1: none */
    uint64_t loss_at;       /* llmq: byte offset in store of a bit for each token; 0: all have loss */
    char *index;            /* Megatron: the .idx file */
    uint64_t entries, ends; /* its sequences, and the length of its document array */
    uint64_t window_count[2]; /* by split; the held-out ones follow the others */
    uint64_t window_first[2]; /* in the source's numbering */
} data_file;

/*
 * spw__data_file_find - recognises path and names what is read, in *out (zeroed before). warned: spw_data_recognise().
 * Errors  those of spw_data_open(); *out may be half filled: close it. A folder gives SPW_OK and path NULL.
 */
spw_status
spw__data_file_find(data_file *out, const char *path, const spw_data_options *o, bool *warned, spw_error *err);
/* A found file as tokens: checks what its format lets one check, or finds or makes them in the cache. */
spw_status spw__data_file_open(data_file *f, const spw_data_options *o, spw_error *err);
void spw__data_file_close(data_file *f); /* accepts a zeroed one */
/* The same, for the formats that have a header; f->path and f->store are set. */
spw_status spw__data_llmc_open(data_file *f, int fd, const spw_data_options *o, spw_error *err);
spw_status spw__data_llmq_open(data_file *f, int fd, const spw_data_options *o, spw_error *err);
spw_status spw__data_megatron_open(data_file *f, int fd, spw_error *err);
/* Megatron: for every document that begins at x, first < x <= first + count, targets[x - first - 1] becomes -1, and tokens[x - first],
 * if it is one of count, gets the mark (0: none). */
spw_status spw__data_megatron_mask(const data_file *f, uint64_t first, uint64_t count, int32_t mark, int32_t *tokens,
                                   int32_t *targets, spw_error *err);
/* Finds f's tokens in the cache, or makes them: sets store, element, begin, tokens and made. */
spw_status spw__data_encode(data_file *f, const spw_data_options *o, spw_error *err);

/* ---------------------------------------------------------------- JSON (lines.c) */

/*
 * A text as JSON. Integers stay integers, and are reals where they have more digits than 64 bits hold for sure: numbers of any size
 * may stand in fields that nobody reads. SPW_ECORRUPT: it is none, or has an object with a name twice.
 */
struct json_t;
spw_status spw__data_json(struct json_t **out, const char *text, uint64_t bytes, spw_error *err);

/* ---------------------------------------------------------------- documents into windows (pack.c) */

typedef struct data_packer data_packer;
typedef struct data_pack_options {
    uint64_t window;     /* words of one */
    uint32_t pad, first; /* what fills a window; the mark of a document's first word */
    spw_status (*emit)(void *ctx, const uint32_t *words, uint64_t count, spw_error *err); /* windows as they are full */
    void *ctx;
} data_pack_options;
spw_status
spw__data_pack_open(data_packer **out, const data_pack_options *o, spw_error *err); /* close it after errors, too */
spw_status
spw__data_pack_put(data_packer *p, uint32_t word, spw_error *err); /* of the document; the first one is marked */
spw_status spw__data_pack_end(data_packer *p, spw_error *err);     /* of the document */
/* Emits what is left, and a word behind all windows, which the last one's last token is followed by. padding: words in
 * all; cut: documents that are longer than a window. */
spw_status spw__data_pack_finish(data_packer *p, uint64_t *padding, uint64_t *cut, spw_error *err);
void spw__data_pack_close(data_packer *p); /* NULL is fine */

/* ---------------------------------------------------------------- pairs of answers (pairs.c) */

/* What a line's pair is. */
typedef struct data_pair {
    const char *answers[2]; /* the fields of the chosen and the rejected answer */
    const char *prompt;     /* the field that comes before both; NULL: none does */
    bool prompted;          /* the line has a prompt, which may be passed over */
    bool bare;              /* nothing comes before its answers, and it has fields beside them */
    bool apart;             /* of conversations: behind what both begin with is not an answer in each */
    bool talks;             /* answers are conversations, else texts or tokens */
    uint64_t shared;        /* of conversations: so many messages, the prompt's included, both begin with */
} data_pair;
/* Errors  without file and line: SPW_ECORRUPT naming the field; SPW_ECONFIG for conversations where there is no layout. */
spw_status spw__data_pair_find(data_pair *out, spw_data_line *line, const spw_data_options *o, spw_error *err);
bool spw__data_pair_has_tokens(const spw_data_line *line, const spw_data_options *o); /* in place of texts */
/* Of a pair's tokens, the rejected one's from `middle` on: takes the targets of what both begin with. */
void spw__data_pair_hide(const spw_tokens *tokens, spw_tokens *targets, uint64_t middle);
/* Whether there is anything to learn: both have a target, of which a first token is none, and are not the same. */
bool spw__data_pair_differs(const spw_tokens *tokens, const spw_tokens *targets, uint64_t middle);
/* Goes on from a checksum with the names of fields. */
uint64_t spw__data_pair_key(const spw_data_options *o, uint64_t sum);

/* ---------------------------------------------------------------- reading */

/* All bytes at offset, or SPW_EIO / SPW_ECORRUPT (the file ends before) with the path: spw_file_read_at(), said of data. */
spw_status spw__data_read(int fd, const char *path, uint64_t offset, void *data, uint64_t bytes, spw_error *err);
/* Opens for reading, close-on-exec, without read-ahead when scattered. *out is -1 after an error. */
spw_status spw__data_fd(int *out, const char *path, bool scattered, spw_error *err);

/* ---------------------------------------------------------------- order (order.c) */

/* A permutation of [0, n), n > 0, keyed by seed and epoch. */
uint64_t spw__data_permute(uint64_t seed, uint64_t epoch, uint64_t i, uint64_t n);

/* Whole shares of a period; sources without a share are never drawn. */
typedef struct data_mix {
    uint32_t count;
    uint64_t period, share[SPW_DATA_SOURCES_MAX];
} data_mix;
/* Shares by weights (count), 0 for a source to leave out; one weight at least is above 0. */
void spw__data_mix_init(data_mix *mix, const double *weights, uint32_t count);

typedef struct data_draw {
    const data_mix *mix;
    uint64_t cycle, slot;                 /* of the next draw: cycle x period + slot */
    uint64_t drawn[SPW_DATA_SOURCES_MAX]; /* in this period */
    uint64_t release[SPW_DATA_SOURCES_MAX], deadline[SPW_DATA_SOURCES_MAX]; /* slots of each source's next draw */
} data_draw;
void spw__data_draw_start(data_draw *draw, const data_mix *mix, uint64_t position);
/* The source of the next draw; *index_out: how many draws it has had before. */
uint32_t spw__data_draw_next(data_draw *draw, uint64_t *index_out);

/* The layout of conversations and their field, in names of caches and for resuming; o->chat is there. */
uint64_t spw__data_chat_key(const spw_data_options *o);

/* Files whose windows are numbered together, and drawn by weight. */
typedef struct data_source {
    const char *name; /* while it is opened, for messages */
    uint32_t file_first, file_count;
    double weight;
    uint64_t windows[2];
} data_source;

struct spw_data {
    data_file *files;
    uint32_t file_count, capacity, fds_kept;
    data_source sources[SPW_DATA_SOURCES_MAX];
    uint32_t source_count;
    data_mix mix[2]; /* by split */
    bool mixed;      /* sources were given, with weights */
    bool warned_of_lines;
    bool split_moved; /* runs before held out other windows, and as many as this */
    uint64_t held_before;
    uint64_t made_bytes; /* of text that became tokens now */
    uint64_t seq_length, seed, vocab, bytes, tokens, windows[2];
    spw_documents documents;
    char formats[200], encoder[64], chat[256];
};

#endif
