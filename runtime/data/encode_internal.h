/*
 * Between a cache of tokens (token_cache.c) and what makes its words (encode.c).
 */
#ifndef SPW_ENCODE_INTERNAL_H
#define SPW_ENCODE_INTERNAL_H

#include "data_internal.h"

enum { SPW__OUT_TOKENS = 4096 };

/* One file on its way to tokens. */
typedef struct encoding {
    const spw_data_options *o;
    const char *path; /* that is read */
    int fd, out;
    uint32_t mode; /* of what is written: others may read it if they may read the text */
    char *part;    /* the file that is written: a name for messages, and its own unless it is nameless */
    bool nameless;
    bool wide, of_tokens; /* of_tokens: lines hold tokens */
    uint64_t vocab;       /* ids are below it */
    uint64_t tokens, documents, line, line_offset;
    uint64_t targets_seen;
    uint64_t untargeted, cut; /* windows without a target, and documents that one does not hold */
    bool targeted;            /* the window of the next word has a target */
    uint64_t longer, alike;   /* pairs left out: longer than a window, without anything to learn */
    uint64_t apart;           /* pairs whose answers are to different prompts */
    bool prompted, bare;      /* a line of pairs has had a prompt; one had none, and fields that may have been meant */
    /* Bytes that were read and not used yet: [at, have) of text, which begins at `offset` of the file. */
    char *text;
    uint64_t room, at, have, offset, size;
    /* The encoder's tokens. */
    int32_t *ids;
    uint64_t id_room;
    spw_tokens turns, targets;          /* of a conversation, or of both parts of a pair */
    spw_tokens listed, labels, lengths; /* of a field that holds tokens: lengths of its documents */
    unsigned char buffer[SPW__OUT_TOKENS * 4];
    uint64_t buffered;
    data_packer *packer; /* of windows that hold whole documents; NULL: tokens follow each other */
} encoding;

/*
 *   text_field      of lines, the one with what is trained on
 *   see_first_line  sets f->of_tokens: whether its first line holds tokens. What is wrong with that line is said when it is read
 *   run             reads all of fd and writes words to out, from the byte `buffered` on
 *   deinit          closes both
 */
const char *spw__encoding_text_field(const spw_data_options *o);
spw_status spw__encoding_see_first_line(data_file *f, const spw_data_options *o, spw_error *err);
spw_status spw__encoding_run(encoding *e, spw_data_format format, spw_error *err);
void spw__encoding_deinit(encoding *e);

#endif
