/* Inside the configuration: one row per key. */
#ifndef SPW_CONFIG_INTERNAL_H
#define SPW_CONFIG_INTERNAL_H

#include "spw_config.h"

typedef enum key_type {
    K_SECTION, /* an object whose keys are rows of their own */
    K_BOOL,
    K_U64,
    K_U32,
    K_REAL,
    K_TEXT, /* char array, bytes in `size` */
    K_BYTES,
    K_PATHS,
    K_TIER,
    K_FORMAT,
    K_DTYPE,
    K_BACKEND,
    K_BETAS,
    K_ANY /* looked at by class only */
} key_type;

typedef enum key_class {
    C_BUILT,
    C_INERT,     /* cannot matter here: said once */
    C_UNBUILT,   /* refused unless it has the value that switches nothing on */
    C_DEPRECATED /* works; help says what replaces it */
} key_class;

#define SPW_CONFIG_NOWHERE SIZE_MAX /* offset of a row whose value is checked and not kept */

typedef struct key_row {
    const char *key, *alias; /* dotted; alias: another spelling of the last part, or NULL */
    key_type type;
    key_class class;
    size_t offset, size;
    double min, max;
    const char *fallback; /* default as JSON text; NULL: none */
    const char *help;
    const char *choices; /* K_TEXT: "a|b|c"; NULL: any */
} key_row;

extern const key_row spw__config_rows[];
extern const uint32_t spw__config_row_count;

#endif
