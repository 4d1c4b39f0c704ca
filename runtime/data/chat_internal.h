/* Inside data: a layout of turns, where it comes from, and a conversation that is being written by it. */
#ifndef SPW_CHAT_INTERNAL_H
#define SPW_CHAT_INTERNAL_H

#include "spw_chat.h"
#include "tokenizer_internal.h"
#include <jansson.h>

typedef enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_TOOL, CHAT_ROLES } chat_role;
enum { CHAT_TOKENS_MAX = 16, CHAT_SAYS_BYTES = 256, CHAT_SPELLED_MAX = 4 };

/* ---------------------------------------------------------------- layouts (chat_layout.c) */

/* before NULL: no such turns. */
typedef struct chat_turn {
    const char *before, *after;
} chat_turn;

/* Where the list of tools stands: behind the system's text, in its turn; before the first user's text, in its turn; before the last
 * user's turn. */
typedef enum chat_place { CHAT_IN_SYSTEM, CHAT_IN_FIRST_USER, CHAT_BEFORE_LAST_USER } chat_place;

/* What is said with tools. {name}, {arguments} and {id} in calls[1], and {id} in what is behind a tool's content, are a call's. */
typedef struct chat_tools {
    chat_place place;
    const char *list[3]; /* before the tools, between two, behind them; [0] NULL: no list */
    int indent;          /* of the JSON in it; 0: on one line */
    bool functions; /* of a tool "type" and "function" are said alone, in this order, and of the latter no "return" */
    const char *environment; /* before the system's text where there are tools, or NULL */
    const char *calls[4]; /* before them, a call, between two (NULL: one at a time), behind them; [1] NULL: no calls */
    const char *joint;    /* between a content and calls; NULL: not both */
    const char *results[2];                /* around turns of tools that follow each other, or NULL */
    bool quoted;                           /* a tool's content is written as a JSON string */
    uint32_t id_bytes;                     /* of a call's id, letters and digits; 0: any */
    const char *tokens[8];                 /* the special tokens in these, up to NULL */
    const char *spelled[CHAT_SPELLED_MAX]; /* what a chat template that says tools so spells, up to NULL */
} chat_tools;

typedef struct chat_layout {
    const char *name;
    const char *begin, *end; /* of a conversation */
    chat_turn turns[CHAT_ROLES];
    chat_tools tools;
    const char *reasoning[2];                                   /* before and behind an answer's; [0] NULL: not said */
    const char *reasoning_spelled;                              /* as tools.spelled */
    const char *tokens[CHAT_TOKENS_MAX];                        /* the special tokens in these, up to NULL */
    bool trim;                                                  /* contents lose the white space at their ends */
    enum { CHAT_ANY, CHAT_BY_CHARS, CHAT_BY_BYTES } vocabulary; /* which tokenizers auto takes it for */
    bool named_only;                                            /* auto never takes it: its tokens say nothing */
    const char *unspelled_tools, *unspelled_reasoning; /* that the template beside the tokenizer lacks; NULL: none */
} chat_layout;

/* *file is what the layout's strings lie in, NULL for a built one. says (bytes) out. */
spw_status spw__chat_find(chat_layout *out, json_t **file, char *says, size_t bytes, const char *name,
                          const spw_tokenizer *t, spw_error *err);

/* ---------------------------------------------------------------- a conversation as text (chat_text.c) */

/* A token of the layout, before the byte `at` of the text. */
typedef struct chat_mark {
    uint64_t at;
    const tok_added *token;
    bool loss;
} chat_mark;

/* JSON that was written (chat_json.c). */
typedef struct chat_json {
    char *text; /* (length) */
    uint64_t length, room;
} chat_json;

struct spw_chat {
    /* Fixed after open. */
    const spw_tokenizer *t;
    chat_layout layout;
    json_t *file; /* that the layout's strings lie in, or NULL */
    char says[CHAT_SAYS_BYTES];
    uint64_t key;
    int32_t end_of_turn;
    /* The conversation that is being written. */
    char *text; /* (bytes) */
    bool *loss; /* (bytes) */
    chat_mark *marks;
    uint64_t bytes, text_bytes, loss_bytes, mark_count, mark_bytes; /* the *_bytes: room */
    char *joined;                                                   /* content that comes in parts */
    char *system; /* (system_length) text that waits for the user's turn; folded: there is one */
    uint64_t joined_bytes, system_bytes, system_length;
    bool folded;
    chat_json json;
    tok_scratch s; /* normal forms */
};

void spw__chat_restart(spw_chat *c);
/* Text of the layout, all of it with loss or without. */
spw_status spw__chat_put_text(spw_chat *c, const char *text, uint64_t bytes, bool loss, spw_error *err);
/* What ends a turn. With loss: up to its first token; all of it if there is none. */
spw_status spw__chat_put_end(spw_chat *c, const char *text, bool loss, spw_error *err);
spw_status spw__chat_put_content(spw_chat *c, const char *text, uint64_t bytes, bool trim, bool loss, spw_error *err);
/* Takes the spaces at the end of what is written away: the token that follows has them. */
void spw__chat_drop_spaces(spw_chat *c);

/* ---------------------------------------------------------------- JSON as prompts have it (chat_json.c) */

/*
 * spw__chat_json_write - appends v as json.dumps(v, ensure_ascii=False) of Python writes it, which transformers' tojson is: names in their
 * order, ", " and ": " between, with an indent each member on a line. SPW_ECORRUPT: an integer of more than 64 bits. SPW_ENOMEM.
 */
spw_status spw__chat_json_write(chat_json *out, const json_t *v, int indent, spw_error *err);
spw_status spw__chat_json_string(chat_json *out, const char *text, uint64_t bytes, spw_error *err);
spw_status spw__chat_json_text(chat_json *out, const char *text, spw_error *err); /* as it is */

/* ---------------------------------------------------------------- messages (chat_message.c, chat_talk.c) */

typedef struct chat_message {
    chat_role role;
    const char *text; /* (bytes) */
    uint64_t bytes;
    bool loss;
    const json_t *calls;   /* that an answer makes: a list with members, or NULL */
    const json_t *thought; /* an answer's reasoning: text, or NULL */
    const char *id;        /* of the call that a tool answers, or NULL */
} chat_message;

/* A member, NULL where it is null, too: rows of several sources have each other's columns so. */
const json_t *spw__chat_member(const json_t *object, const char *name);
/* Whether a member says nothing: missing, false, or empty. */
bool spw__chat_says_nothing(const json_t *v);
/* Whether a message is a user's question; what a layout writes around a tool's result, in a user's turn, is none. */
bool spw__chat_is_question(const spw_chat *c, const json_t *message);
/* Reads a message; a content in parts is joined in c. */
spw_status spw__chat_read(spw_chat *c, chat_message *m, const json_t *v, spw_error *err);
/* What a call says: *name, *id (or NULL), and *arguments, which the caller gives back. */
spw_status
spw__chat_read_call(const json_t *call, const char **name, const char **id, json_t **arguments, spw_error *err);

/* How far a conversation is written. */
typedef struct chat_talk {
    const json_t *system; /* what the line has besides its lists, or NULL */
    json_t *tools;        /* a list with members, or NULL; own */
    chat_role last;       /* CHAT_ROLES: no turn yet */
    uint64_t count;       /* messages so far; of these the first `without` have no loss */
    uint64_t without;
    uint64_t last_user, last_question; /* messages, of all that there are, counted so; UINT64_MAX: none */
    bool told, listed;                 /* the system's turn, and the list of tools, is written */
    bool results;                      /* turns of tools, which are to be closed */
    const json_t *calls;               /* of the last answer, or NULL */
    uint64_t open;                     /* how many of them no tool has answered */
} chat_talk;

/* Looks through the messages of the fields for where the last user's turn is; prompt: may be NULL, or name a text. */
void spw__chat_look(const spw_chat *c, chat_talk *k, const json_t *line, const char *prompt, const char *field);
spw_status spw__chat_begin(spw_chat *c, chat_talk *k, spw_error *err);
spw_status spw__chat_put_prompt(spw_chat *c, chat_talk *k, const json_t *line, const char *field, spw_error *err);
spw_status spw__chat_put_list(spw_chat *c, chat_talk *k, const json_t *line, const char *field, spw_error *err);
spw_status spw__chat_end(spw_chat *c, chat_talk *k, const char *field, spw_error *err);
/* A conversation of one user's turn, up to where an answer's content begins. */
spw_status spw__chat_ask(spw_chat *c, const char *text, uint64_t bytes, spw_error *err);

#endif
