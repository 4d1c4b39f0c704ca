/* A configuration that is complete, and what is said while one is read. */
#ifndef LIB_CONFIG_H
#define LIB_CONFIG_H

#include "spw_config.h"

extern const char config_whole[]; /* of the design page */

/* Hears from now on what is logged, until spw_log_set(): lines of "warning TEXT" or "info TEXT". */
extern char config_heard[4000];
void config_listen(void);

#endif
