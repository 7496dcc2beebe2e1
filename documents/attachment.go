package documents

import (
	"fmt"
	"mime"
	"net/http"
	"strconv"
)

// WriteAttachment writes a document as the response. Content-Disposition: attachment keeps browsers from rendering it.
func WriteAttachment(w http.ResponseWriter, d Document, content []byte) error {
	h := w.Header()
	h.Set("Content-Type", d.ContentType)
	h.Set("Content-Length", strconv.Itoa(len(content)))
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": d.Name}))
	h.Set("X-Content-Type-Options", "nosniff")
	if _, err := w.Write(content); err != nil {
		return fmt.Errorf("send document: %w", err)
	}
	return nil
}
