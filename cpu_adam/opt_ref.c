/* opt_block.h compiled everywhere. */
#include "cpu_adam_internal.h"
#define OPT_TABLE spw__opt_table_ref
#include "opt_block.h"
