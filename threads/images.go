package threads

import (
	"context"
	"encoding/base64"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
)

// Bounds of the images of a message. The table has the bound of bytes, too.
const (
	MostImages    = 8
	MostImageSize = 5 << 20
	MostImageURL  = 2048
)

// Image is an image of a message: a URL of https, which the runtime never fetches, or the image itself.
type Image struct {
	URL       string
	MediaType string // of Data: image/png, image/jpeg, image/gif or image/webp
	Data      []byte
	Detail    string // low, high, auto or ""
}

// Part is the image as a model gets it.
func (i Image) Part() models.Part {
	url := i.URL
	if url == "" {
		url = "data:" + i.MediaType + ";base64," + base64.StdEncoding.EncodeToString(i.Data)
	}
	return models.Part{Image: &models.Image{URL: url, Detail: i.Detail}}
}

// saveImages stores the images of messages that were just posted, in the order of their drafts.
func saveImages(ctx context.Context, db postgres.DB, posted []Message, drafts []Draft) error {
	b := &pgx.Batch{}
	for n, d := range drafts {
		for i, image := range d.Images {
			b.Queue(`
				insert into agent_message_images (message_id, place, url, media_type, data, detail)
				values (@message::uuid, @place, nullif(@url, ''), nullif(@media_type, ''), @data::bytea, @detail)`,
				postgres.Strict{
					"message": posted[n].ID, "place": i + 1, "url": image.URL, "media_type": image.MediaType,
					"data": image.Data, "detail": image.Detail,
				})
		}
	}
	if b.Len() == 0 {
		return nil
	}
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("save images: %w", err)
	}
	return nil
}

// Images reads the images of messages, by the message's id. Messages without any cost no query.
func Images(ctx context.Context, db postgres.DB, messages []Message) (map[string][]Image, error) {
	var ids []string
	for _, m := range messages {
		if m.Images > 0 {
			ids = append(ids, m.ID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := db.Query(ctx, `
		select message_id::text, coalesce(url, ''), coalesce(media_type, ''), data, detail
		  from agent_message_images where message_id = any (@ids::uuid[]) order by message_id, place`,
		postgres.Strict{"ids": ids})
	if err != nil {
		return nil, fmt.Errorf("read images: %w", err)
	}
	found := map[string][]Image{}
	var id string
	var image Image
	_, err = pgx.ForEachRow(rows, []any{&id, &image.URL, &image.MediaType, &image.Data, &image.Detail}, func() error {
		found[id] = append(found[id], image)
		image.Data = nil
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read images: %w", err)
	}
	return found, nil
}
