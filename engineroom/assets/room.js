// What the pages do beyond reading: see engineroom.go.
"use strict";
