/* Inside data: a layout of turns, and where it comes from. */
#ifndef SPW_CHAT_INTERNAL_H
#define SPW_CHAT_INTERNAL_H

#include "spw_chat.h"
#include <jansson.h>

typedef enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_TOOL, CHAT_ROLES } chat_role;
enum { CHAT_TOKENS_MAX = 16 };

/* before NULL: no such turns. */
typedef struct chat_turn {
    const char *before, *after;
} chat_turn;

typedef struct chat_layout {
    const char *name;
    const char *begin, *end; /* of a conversation */
    chat_turn turns[CHAT_ROLES];
    const char *tokens[CHAT_TOKENS_MAX];                        /* the special tokens in these, up to NULL */
    bool trim;                                                  /* contents lose the white space at their ends */
    enum { CHAT_ANY, CHAT_BY_CHARS, CHAT_BY_BYTES } vocabulary; /* which tokenizers auto takes it for */
    bool named_only;                                            /* auto never takes it: its tokens say nothing */
} chat_layout;

/* chat_layout.c: *file is what the layout's strings lie in, NULL for a built one. says (bytes) out. */
spw_status spw__chat_find(chat_layout *out, json_t **file, char *says, size_t bytes, const char *name,
                          const spw_tokenizer *t, spw_error *err);

#endif
